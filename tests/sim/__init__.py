"""A simulated device: queues that run late, on memory that is poisoned."""
