"""Implementations of the operators other than those of `liger_kernel.ops`."""
