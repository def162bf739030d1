"""What a training loop calls: preparing, accumulation windows, steps, learning rates, memory."""
