"""Where samplers are, and what other engines than ours need besides: told before any device is used."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config, Rollout, override, validate
from jaxrl_llm.data import tasks
from jaxrl_llm.models import presets
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.sampler import openai

OTHER = {"servers": ("openai+http://a:1", "openai+https://[::1]:2"), "servers_folder": "/w"}
OTHER |= {"servers_reload": partial(openai.from_disk, ca="ca.pem")}


def made(**rollout):
    return Config(tasks.chain, ALGORITHMS["grpo"], presets.NANO, rollout=Rollout(**rollout))


def test_ours_and_others():
    for rollout in ({}, {"servers": ("a:1", "[::1]:2")}, OTHER, OTHER | {"servers_seeded": False}):
        config = made(**rollout)
        assert validate(config) == config
        back = configs.from_json(json.loads(configs.dumps(config)))
        assert configs.dumps(back) == configs.dumps(config)
    changes = ['rollout.servers=["openai+http://a:1"]', "rollout.servers_folder=/w"]
    changes += ["rollout.servers_reload=jaxrl_llm.sampler.openai:vllm"]
    assert validate(override(made(), *changes)).rollout.servers_reload is openai.vllm


WRONG = {
    "rollout.servers.0 is 'a'; expected host:port": {"servers": ("a",)},
    "rollout.servers.0 is 'http://a:1'; expected host:port": {"servers": ("http://a:1",)},
    "rollout.servers.1 is 'a:1'; expected openai+http://host:port, as others are": OTHER
    | {"servers": ("openai+http://b:1", "a:1")},
    "rollout.servers.0 is 'openai+http://a:1/v1'": OTHER | {"servers": ("openai+http://a:1/v1",)},
    "rollout.servers.0 is 'openai+ftp://a:1'": OTHER | {"servers": ("openai+ftp://a:1",)},
    "rollout.servers_folder is ''; expected set when rollout.servers are openai+http://": OTHER
    | {"servers_folder": ""},
    "rollout.servers_reload is None; expected set when": OTHER | {"servers_reload": None},
    "rollout.servers_folder is '/w'; expected set when": {"servers": ("a:1",), "servers_folder": "/w"},
    "expected set when rollout.servers are openai+http://, and only then": {"servers_reload": openai.vllm},
    "rollout.servers_seeded is False; expected True": {"servers_seeded": False},
    "rollout.servers_reload: <lambda>: too many positional": OTHER | {"servers_reload": lambda url: None},
    "rollout.zero_gap is True": OTHER | {"zero_gap": True},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(replace(made(), rollout=Rollout(**WRONG[message])))
