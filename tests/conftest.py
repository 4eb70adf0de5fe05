"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# An example may take what it takes, and so may its making: a clock on the wall would judge the
# machine. Tests of what something costs measure the processor's time.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
