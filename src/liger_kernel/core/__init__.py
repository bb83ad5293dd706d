"""What every kernel stands on: how an operator is called, launched and tiled, on which device, over
which ranks."""
