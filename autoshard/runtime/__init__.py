"""What emitted modules need while they run."""
