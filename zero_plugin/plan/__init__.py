"""What every stage and offload costs in memory and time, by arithmetic, and which choice is the fastest that fits."""
