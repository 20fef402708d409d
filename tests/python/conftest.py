"""Fixtures, and how hard Hypothesis tries: HYPOTHESIS_PROFILE is `fast`, the default, or `slow`."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("support")

from support import new_cache, new_filled_cache  # noqa: E402

# A busy machine is no finding.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fast", max_examples=200, stateful_step_count=50, **PATIENT)
settings.register_profile("slow", max_examples=3_000, stateful_step_count=100, **PATIENT)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture
def cache():
    """An empty cache."""
    return new_cache()


@pytest.fixture
def filled():
    """A cache of `tokens(6)`."""
    return new_filled_cache()


@pytest.fixture(scope="session")
def test_data():
    """The folder of real model outputs that KVSPAN_TEST_DATA names."""
    folder = os.environ.get("KVSPAN_TEST_DATA")
    if not folder:
        pytest.skip("KVSPAN_TEST_DATA is not set")
    return Path(folder)
