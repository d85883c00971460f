"""LoRA adapters: from files to the rank rows that a step multiplies with.

An adapter has five forms on its way from a file to a kernel:

    1. `adapter.AdapterSource`     folders on disk, and the digest that their files must have
         | files/     find, limit, check and read; `reader/` does the same in another process, beside the steps
    2. `adapter.Adapter`           checked weights by module, scaled, in the dtype of use; its digest keys every cache
         | device/layout.py packs them side by side, as the device has them
    3. `tiers.row_writer.HostEntry`  the adapter in host memory: packed rows, ready to be copied
         | tiers/     make room, least recently used first; copy in a thread
    4. `device.pool.Allocation`    rank rows on the device, in the slabs of `device.arena.RowArena`
         | device/batching.py, for each step
    5. `device.layers.LoraBatch`   row indices of each token's adapter: what the kernels in `kernels/lora` get

Other types stand beside this way, not on it: `StoredModule` and `PackedModules` are used inside one stage, and
`registry.versions.AdapterVersion` is what a request is bound to (name, digest, requests; no weights).

    files/      adapter_config.json, tensor keys and headers, pickles, patterns, limits against hostile files
    registry/   names, versions, mixes, and the requests bound to each
    tiers/      host memory and device residency, transfers, pins, aging of requests that wait for room
    device/     pool of rank rows, their layout, the sites in the model's layers, inputs of each step
    reader/     the process that reads files, its messages, and the client that starts it

`manager.AdapterManager` is the front that the engine uses. It runs in the engine's thread and owns all state; loader
threads read and write, and hand their results to it. A request keeps the version that it began with, also when the
adapter is loaded again. A broken adapter fails its own requests alone.
"""
