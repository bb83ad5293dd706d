"""The base of every operator: registration and autograd, launches and their tuning, devices, shared
kernel functions, communication of ranks, host memory."""
