"""ZeRO 0-3 through the DeepSpeed engine; the only folder that imports deepspeed."""
