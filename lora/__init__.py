"""LoRA adapters: from files to the rank rows that a step multiplies with.

    folder  ->  files/     found, checked and read: `adapter.Adapter`, whose digest keys every cache
            ->  registry/  a name, its versions, and the requests bound to each
            ->  tiers/     host memory, then rows of the device; least recently used adapters make way
            ->  device/    rank rows side by side for all places of a model, and each step's inputs

`manager.AdapterManager` is the front that the engine uses. `reader/` is another process that reads files, so that steps
are not slower for it. A request keeps the version that it began with; a broken adapter fails its own requests alone.
"""
