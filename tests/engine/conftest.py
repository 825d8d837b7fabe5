import pytest

from anyrig.core.config import EngineConfig
from anyrig.engine.engine import Engine


@pytest.fixture(scope="session")
def engine():
    """The default model in float32, shared by the tests that leave nothing behind in it."""
    return Engine("smollm2-135m", EngineConfig(dtype="float32", kv_cache_memory="512MiB"))


@pytest.fixture
def run(engine):
    """Run requests `(prompt, params)` together; results in their order."""

    def run(*requests):
        for i, (prompt, params) in enumerate(requests):
            engine.add_request(f"test-{i}", prompt, params)
        done = {}
        while engine.has_unfinished():
            done.update((out.request_id, out) for out in engine.step())
        return [done[f"test-{i}"] for i in range(len(requests))]

    yield run
    for request_id in list(engine._requests):  # a failed test must not leave its requests to the next one
        engine.abort(request_id)
