"""CUDA sources become a loadable object: preflight, key, lock, look again, build aside, rename, load.

Nothing is compiled when a module is imported, and nothing without a word: `ensure` says what it does through `say`. The
sources take raw pointers and include nothing of PyTorch, so the objects depend on no version of PyTorch: the key is
made of sources, flags, architecture and the versions of nvcc, the C++ compiler and CUTLASS.
"""
