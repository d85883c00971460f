"""LoRA adapters: from files to the rank rows that a step multiplies with.

An adapter has five forms on its way from a file to a kernel:

    1. folders            `adapter.AdapterSource`: paths on disk, and the digest that the files must have
         | files/         find, limit and check
    2. module index       `files.peft_config.PeftConfig` and a `StoredModule` for each module: rank, scale, keys
         | files/         read, cast, scale, transpose and pack; `reader/` does all this in another process
    3. packed weights     `adapter.Adapter`: rank rows in host memory, in the dtype of use; its digest keys every cache
         | tiers/         evict, least recently used first; copy in a thread
    4. device rows        `device.pool.Allocation`: the rows of `device.arena.RowArena` that it owns
         | device/        for each step
    5. step's batch       `device.layers.LoraBatch`: the rows of each token, as the kernels in `kernels/lora` take them

A request is bound to a `registry.versions.AdapterVersion`: a name, a digest and its requests, without weights.

    files/      adapter_config.json, tensor keys and headers, pickles, patterns, limits against hostile files; `kinds/`
                has one file for each `peft_type`
    registry/   the catalog of names, versions, mixes, and the requests bound to each
    tiers/      host memory and device residency, transfers, pins, aging of requests that wait for room
    device/     pool of rank rows, their layout, the sites in the model's layers, inputs of each step
    reader/     the process that reads files, its messages, and the client that starts it

The engine uses `manager.AdapterManager` for requests and steps, and its `catalog` for load, unload, pin and list. The
engine's thread owns all state; loader threads read and write, and return results to it. A request keeps the version
that it began with, even if the adapter is reloaded. A broken adapter fails only its own requests.
"""
