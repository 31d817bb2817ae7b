"""What a step did: times, kernels, memory."""
