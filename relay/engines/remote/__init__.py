"""What the engine `http` is made of: a run's driver, its frames, its sub-streams (W3.2)."""
