"""Our C++ kernels for CPUs (csrc/cpu), one extension module per instruction set; `native` picks the one to use."""
