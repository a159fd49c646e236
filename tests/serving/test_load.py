"""A server of its own under load: random requests, cancellations and deadlines from four clients.

LOAD_SECONDS: how long, 120 if left out.
"""

import os
import random
import subprocess
import sys
import threading
import time

import grpc
import jax
import numpy as np
import pytest
from cases import free_port

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
CLIENTS, POOL = 4, 60


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


@pytest.mark.slow
def test_load(experiment, served):
    process, address = served
    config = configs.load(experiment)
    params = transformer.init(config.model, jax.random.key(7))
    asked, expected = pool(config, params)
    until = time.monotonic() + float(os.environ.get("LOAD_SECONDS", 120))
    counts, errors, seen = dict.fromkeys(("answers", "cancelled", "deadlines"), 0), [], []
    lock = threading.Lock()

    def check(request, group):
        for a, b in zip(group, expected[request.draw], strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)

    def one(seed):
        rng = random.Random(seed)
        client = Client([address], deadline_s=60.0, in_flight=8, run="load")  # the same weights, so one learner
        channel = grpc.insecure_channel(address)
        call = channel.unary_unary(f"/{wire.SERVICE}/Sample", pb.SampleRequest.SerializeToString, None)
        try:
            client.push(named(weights.push(config.model, params, None).params), 0)
            while time.monotonic() < until:
                some = rng.choices(asked, k=rng.randrange(1, 12))
                kind = rng.random()
                if kind < 0.6:
                    for request, group in zip(some, client.ordered(some), strict=True):
                        check(request, group)
                    what, n = "answers", len(some)
                elif kind < 0.8:
                    left = iter(some)
                    stream = client.sample(lambda left=left: next(left, None))
                    check(*next(stream))
                    stream.close()
                    what, n = "cancelled", 1
                else:
                    message = wire.to_request_message(some[0], f"{seed}-{rng.random()}")
                    error = call.future(message, timeout=rng.uniform(0.001, 0.05)).exception()
                    assert error is None or error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
                    what, n = "deadlines", 1
                with lock:
                    counts[what] += n
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            client.close()
            channel.close()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        seen.append(memory(process))
        assert process.poll() is None
        time.sleep(1)
    for thread in threads:
        thread.join()
    assert not errors
    client, end = Client([address]), time.monotonic() + 20
    while (stats := client.stats()[0])["slots_free"] < 16 or stats["queued"] or stats["running"]:
        assert time.monotonic() < end, stats
        time.sleep(0.1)
    client.close()
    print(counts, stats, f"{min(seen) / 1e6:.0f} to {max(seen) / 1e6:.0f} MB")
    assert min(counts.values()) > 10
    # What stays, without the peaks of a program that is being compiled
    quarter = len(seen) // 4
    settled, last = min(seen[quarter : 2 * quarter]), min(seen[-quarter:])
    assert last < 1.05 * settled + 20e6, f"memory grows from {settled / 1e6:.0f} to {last / 1e6:.0f} MB"
