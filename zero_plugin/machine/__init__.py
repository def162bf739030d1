"""What this machine has: memory, cores, devices, network, disks, and the scheduler's job."""
