"""Side by side with eager PyTorch: losses, gradients, buffers, optimizer state; and who is to blame."""
