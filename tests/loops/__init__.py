"""Training loops as people write them, each run in eager PyTorch and with Wholestep and compared."""
