"""The hardware and surroundings of this machine: memory, cores, devices, network, disks, and the scheduler's job."""
