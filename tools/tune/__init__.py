"""Search for the launch configs of the Triton kernels: `python tools/tune` on a machine with a GPU.

`shapes` names the sizes of models, `workloads` makes work of these sizes, `space` lists the configs to try, `timer`
times them, `search` takes the fastest that gives the default's results, and `command` is the command line.
"""
