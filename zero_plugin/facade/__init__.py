"""The parts of the facade by topic; `Accelerator` is made of them."""
