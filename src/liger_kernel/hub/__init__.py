"""What `scripts/build-hub-kernel` makes a kernel for Hugging Face's hub of: layers for the package
`kernels`."""
