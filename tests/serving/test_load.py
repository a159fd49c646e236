"""A server of its own under load: random requests, cancellations and deadlines from eight clients, two that push, and
one that reads slowly.

LOAD_SECONDS: how long, 120 if left out.
"""

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter

import grpc
import jax
import numpy as np
import pytest
from cases import free_port
from fake_backend import slow_reader

from jaxrl_llm import config as configs
from jaxrl_llm.models import transformer
from jaxrl_llm.sampler import decode, weights, wire
from jaxrl_llm.sampler import rollout_pb2 as pb
from jaxrl_llm.sampler.client import Client, named
from jaxrl_llm.sampler.requests import Request
from jaxrl_llm.sampler.sampling import Sampling

pytest.importorskip("jetstream")

EXPERIMENT = """
from functools import partial
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.config import Config, Rollout
from jaxrl_llm.data import tasks
from jaxrl_llm.models.transformer import ModelConfig

CONFIG = Config(
    task=partial(tasks.chain, modulus=3, terms=(2, 4)),
    algorithm=ALGORITHMS["grpo"],
    model=ModelConfig(vocab_size=112, layers=1, width=32, heads=2, kv_heads=1, head_width=16, mlp_width=64),
    rollout=Rollout(prompts=4, group_size=4, max_prompt_tokens=32, max_response_tokens=48, slots=16,
                    tokens_per_call=8),
)
"""
CLIENTS, POOL = 8, 60
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / "tiny.py"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture(scope="module")
def served(experiment):
    """A server's process and address, with weights of its own."""
    port = free_port()
    command = [sys.executable, "-m", "jaxrl_llm.cli", "serve", str(experiment), "--port", str(port), "--unwatched"]
    process = subprocess.Popen(command, env={**os.environ, "XLA_FLAGS": ""})
    yield process, f"127.0.0.1:{port}"
    process.terminate()
    assert process.wait(30) == 0


def memory(process):
    """Bytes that a process has in memory."""
    with open(f"/proc/{process.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pool(config, params):
    """Requests of many kinds, and what this process answers to them."""
    rng = random.Random(0)
    asked = [
        Request(
            tuple(rng.randrange(2, 98) for _ in range(rng.choice((1, 5, 20, 32)))),
            group=rng.choice((1, 2, 4, 7)),
            max_tokens=rng.choice((1, 8, 30, 48)),
            sampling=rng.choice((Sampling(), Sampling(0.0), Sampling(0.7, top_k=5))),
            draw=i,
        )
        for i in range(POOL)
    ]
    engine = decode.LocalEngine(config.model, config.tokenizer(), weights.push(config.model, params, None), slots=64)
    return asked, decode.generate(engine, asked)


class Load:
    """What the threads share: how often each did its work, what went wrong, when it ends."""

    def __init__(self, address, asked, expected):
        self.address, self.asked, self.expected = address, asked, expected
        self.until = time.monotonic() + float(os.environ.get("LOAD_SECONDS", 120))
        self.counts, self.errors, self.lock = Counter(), [], threading.Lock()

    def check(self, request, group):
        for a, b in zip(group, self.expected[request.draw], strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)

    def thread(self, work, number):
        """Calls work(load, rng), which yields what it has done and how often, until the time is over."""

        def run():
            rng = random.Random(number)
            try:
                for what, n in work(self, rng):
                    with self.lock:
                        self.counts[what] += n
                    if time.monotonic() > self.until:
                        return
            except BaseException as error:
                self.errors.append(error)
                raise

        return threading.Thread(target=run)


def sampling(load, rng):
    """A client: whole answers, some of them in parts, iterators that are closed, calls that end early."""
    client, hurried = Client([load.address], in_flight=8), Client([load.address], deadline_s=2.0, retries=10**6)
    channel = grpc.insecure_channel(load.address)
    call = channel.unary_unary(f"/{wire.SERVICE}/Sample", pb.SampleRequest.SerializeToString, None)
    try:
        while True:
            some = rng.choices(load.asked, k=rng.randrange(1, 12))
            kind = rng.random()
            if kind < 0.6:
                who = client if kind < 0.5 else hurried
                for request, group in zip(some, who.ordered(some), strict=True):
                    load.check(request, group)
                yield ("answers" if who is client else "hurried"), len(some)
            elif kind < 0.8:
                left = iter(some)
                stream = client.sample(lambda left=left: next(left, None))
                load.check(*next(stream))
                stream.close()
                yield "cancelled", 1
            else:
                message = wire.to_request_message(some[0], f"{rng.random()}")
                error = call.future(message, timeout=rng.uniform(0.001, 0.05)).exception()
                assert error is None or error.code() in (Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED), error
                yield "deadlines", 1
    finally:
        client.close()
        hurried.close()
        channel.close()


def pushing(load, rng, leaves):
    """A learner of the run pushes the same weights under other versions or breaks off; a rival's are refused."""
    channel = grpc.insecure_channel(load.address)
    push = channel.stream_unary(f"/{wire.SERVICE}/LoadWeights", pb.Chunk.SerializeToString, pb.LoadReply.FromString)
    name, version = f"{rng.random()}", 0
    try:
        while True:
            time.sleep(rng.uniform(0.2, 1.5))
            version, kind = version + 1, rng.random()
            chunks = list(wire.to_chunks(leaves, version, "rival" if kind < 0.2 else "load", name))
            if kind > 0.7:
                chunks = chunks[: rng.randrange(1, len(chunks))]
            expected = Code.DATA_LOSS if kind > 0.7 else Code.FAILED_PRECONDITION if kind < 0.2 else Code.OK
            call = push.future(iter(chunks), timeout=60)
            assert call.code() is expected, call
            yield ("pushes" if expected is Code.OK else "refused pushes"), 1
    finally:
        channel.close()


def reading_slowly(load, rng):
    """Takes replies seconds after they were sent, or not at all."""
    port = int(load.address.rpartition(":")[2])
    while True:
        request = rng.choice(load.asked)
        with slow_reader(port) as (through, release):
            channel = grpc.insecure_channel(f"127.0.0.1:{through}", [("grpc.use_local_subchannel_pool", 1)])
            call = channel.unary_unary(f"/{wire.SERVICE}/Sample", pb.SampleRequest.SerializeToString, None)
            future = call.future(wire.to_request_message(request, f"{rng.random()}"), timeout=60)
            time.sleep(rng.uniform(0.5, 3.0))
            if rng.random() < 0.7:
                release()
                load.check(request, wire.from_reply(pb.SampleReply.FromString(future.result())))
            channel.close()
        yield "read slowly", 1


@pytest.mark.slow
def test_load(experiment, served):
    process, address = served
    config = configs.load(experiment)
    params = transformer.init(config.model, jax.random.key(7))
    load, seen = Load(address, *pool(config, params)), []
    leaves = {name: np.asarray(x) for name, x in named(weights.push(config.model, params, None).params).items()}
    learner = Client([address], run="load")
    learner.push(leaves, 0)
    pusher = lambda load, rng: pushing(load, rng, leaves)
    threads = [load.thread(work, i) for i, work in enumerate([*[sampling] * CLIENTS, pusher, pusher, reading_slowly])]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        seen.append(memory(process))
        assert process.poll() is None
        time.sleep(1)
    for thread in threads:
        thread.join()
    assert not load.errors
    end = time.monotonic() + 60  # a connection whose peer is silent is given up after 15 s
    while (
        (stats := learner.stats()[0])["slots_free"] < 16 or stats["queued"] or stats["running"] or stats["held_bytes"]
    ):
        assert time.monotonic() < end, stats
        time.sleep(0.1)
    learner.close()
    print(dict(load.counts), stats, f"{min(seen) / 1e6:.0f} to {max(seen) / 1e6:.0f} MB")
    assert len(load.counts) == 7
    assert min(load.counts.values()) > 5
    # What stays, without the peaks of a program that is being compiled
    quarter = len(seen) // 4
    settled, last = min(seen[quarter : 2 * quarter]), min(seen[-quarter:])
    assert last < 1.05 * settled + 20e6, f"memory grows from {settled / 1e6:.0f} to {last / 1e6:.0f} MB"
