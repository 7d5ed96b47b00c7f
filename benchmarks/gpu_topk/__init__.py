"""Checks and times the kernels of `runtime.kernels` on this machine's GPU. Needs torch with CUDA and nothing else.

    python -m benchmarks.gpu_topk

Compares them bit for bit with the reference, on all kinds of input, then times them beside torch's operations, MSTopK
with 30 rounds, and the device's own copy; prints the tables, and writes them into docs/results/gpu-topk.md. Takes less
than ten minutes. Exit code 1 if a result differs or a target is missed, 3 without a device.
"""
