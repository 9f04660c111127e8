"""C++ kernels of the ops on the CPU: the sources, and `kernels`, which builds and calls them."""
