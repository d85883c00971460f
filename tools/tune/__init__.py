"""Search for the launch configs of the Triton kernels: `python tools/tune` on a machine with a GPU.

`workloads` makes work of a model's sizes, `space` lists the configs to try, `search` times them and takes the fastest
that gives the default's results, and `command` is the command line.
"""
