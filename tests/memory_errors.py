"""Nine kinds of errors by which libraries say that memory ran out, in their own words."""

import torch

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation for Memory Management"
KINDS: dict[str, Exception] = {
    "CUDA": torch.OutOfMemoryError(CUDA),
    "cudaMallocAsync": torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."),
    "the CUDA driver": torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "MPS": RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GiB, max allowed: 9.07 GiB)"),
    "CPU": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4611686018427387904 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "CPU on Windows": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried to allocate "
        "12000000000 bytes."
    ),
    "Python": MemoryError(),
}
