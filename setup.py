"""Package metadata. `pip install -e .` is the small install; extras add hardware, serving and development."""

from setuptools import find_packages, setup

setup(
    name="jaxrl_llm",
    version="0.1.0",
    description="Reinforcement learning post-training of language models in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["jaxrl_llm", "jaxrl_llm.*"]),
    package_data={"jaxrl_llm": ["sampler/*.proto"]},
    install_requires=[
        "jax>=0.10.2",
        "flax>=0.12.8",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "numpy",
        "prometheus_client",
        "grpcio>=1.80",
        "protobuf>=7.35.1",
        "transformers>=5.0",
        "safetensors",
        "huggingface_hub",
        "tokenizers",
        "jaxtyping",
        "jinja2",
        "matplotlib",
        "rich",
        "tensorboardX",
        "tyro",
    ],
    extras_require={
        "tpu": ["jax[tpu]>=0.10.2"],
        "cuda": ["jax[cuda13]>=0.10.2"],
        "serve": ["google-jetstream==0.2.2"],
        "torch": ["torch"],
        "data": ["array_record", "bm25s", "grain", "math-verify", "pyarrow", "rensa", "tensorflow-datasets"],
        "dev": ["beartype", "hypothesis", "import-linter", "pytest", "pytest-xdist", "ruff"],
    },
    entry_points={"console_scripts": ["jaxrl=jaxrl_llm.cli:main"]},
)
