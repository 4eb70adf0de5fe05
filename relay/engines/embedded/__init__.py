"""The engine that runs CNL documents in this process (W3.1)."""
