"""The objects behind a training loop: preparing, accumulation windows, steps, learning rates, memory."""
