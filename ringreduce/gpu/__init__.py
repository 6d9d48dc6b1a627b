"""GPUs: the kernels as the driver loads them."""
