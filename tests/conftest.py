"""What holds for every test.

Examples that hypothesis makes are the same in every run, and a slow machine is no failure: no time limit for each.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ours", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ours")
