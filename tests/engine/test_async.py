"""Many coroutines, one engine."""

import asyncio

import pytest

from anyrig import AsyncLLM, SamplingParams
from anyrig.core.config import EngineConfig
from anyrig.core.errors import AnyrigError, InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    llm = AsyncLLM("smollm2-135m", EngineConfig(dtype="float32", kv_cache_memory="256MiB"))
    yield llm
    llm.shutdown()


def test_streams_of_many_coroutines_grow_to_the_same_result_as_one_alone(llm):
    async def texts(prompt):
        return [out.outputs[0].text async for out in llm.stream(prompt, GREEDY)]

    async def main():
        prompts = [f"{i} and {i + 1} are" for i in range(6)]
        alone = [(await llm.generate(p, GREEDY)).outputs[0].text for p in prompts]
        streams = await asyncio.gather(*[texts(p) for p in prompts])
        for final, stream in zip(alone, streams, strict=True):
            assert stream[-1] == final
            assert all(final.startswith(t) for t in stream)

    asyncio.run(main())


def test_a_cancelled_task_frees_its_place(llm):
    async def main():
        async def endless():
            async for _ in llm.stream("Once", GREEDY.replace(max_tokens=2000)):
                pass

        task = asyncio.create_task(endless())
        while not llm.engine.stats.running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(500):
            if not llm.engine.has_unfinished():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the request is still running")

    asyncio.run(main())


def test_abort_ends_a_stream_with_what_it_had(llm):
    async def main():
        last = None
        async for out in llm.stream("Once", GREEDY.replace(max_tokens=2000), request_id="mine"):
            last = out
            if len(out.outputs[0].token_ids) == 3:
                await llm.abort("mine")
        assert last.finished and last.outputs[0].finish_reason == "abort"
        assert 3 <= len(last.outputs[0].token_ids) < 2000

    asyncio.run(main())


def test_a_bad_request_raises_in_its_own_coroutine_only(llm):
    async def main():
        good = asyncio.create_task(llm.generate("One two", GREEDY))
        with pytest.raises(InvalidRequest, match="empty"):
            await llm.generate("", GREEDY)
        assert (await good).finished

    asyncio.run(main())


def test_a_second_request_of_the_same_id_is_refused_and_leaves_the_first_alone(llm):
    async def main():
        first = llm.stream("Once", GREEDY, request_id="same")
        await anext(first)
        with pytest.raises(InvalidRequest, match="still running"):
            await llm.generate("Once", GREEDY, request_id="same")
        rest = [out async for out in first]
        assert rest[-1].finished and rest[-1].outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_when_a_step_fails_nobody_waits_for_ever():
    llm = AsyncLLM("smollm2-135m", EngineConfig(dtype="float32", kv_cache_memory="64MiB"))

    def broken():
        import time

        time.sleep(0.3)  # others come in meanwhile
        raise MemoryError("no memory for this step")

    llm.engine.step = broken

    async def main():
        calls = [asyncio.create_task(llm.generate("x", GREEDY)) for _ in range(2)]
        await asyncio.sleep(0.15)
        calls += [asyncio.create_task(llm.generate("y", GREEDY)) for _ in range(2)]
        errors = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        assert all(isinstance(e, AnyrigError) and "no memory" in str(e) for e in errors)

    asyncio.run(main())


def test_an_idle_engine_costs_no_processor_time(llm):
    import time

    asyncio.run(llm.generate("One two", GREEDY))
    time.sleep(0.3)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_after_shutdown_requests_are_refused():
    llm = AsyncLLM("smollm2-135m", EngineConfig(dtype="float32", kv_cache_memory="64MiB"))

    async def main():
        stream = llm.stream("Once", GREEDY.replace(max_tokens=2000))
        await anext(stream)
        llm.shutdown()
        with pytest.raises(AnyrigError, match="shut down"):
            async for _ in stream:
                pass
        with pytest.raises(AnyrigError, match="not running"):
            await llm.generate("x", GREEDY)

    asyncio.run(main())
