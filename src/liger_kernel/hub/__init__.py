"""Layers for the package `kernels`, of which `scripts/build-hub-kernel` makes a kernel for Hugging
Face's hub."""
