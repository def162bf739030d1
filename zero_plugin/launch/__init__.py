"""Start the workers: settings become a typed spec, the spec runs on torchrun's engine, the run is supervised."""
