"""`python -m jaxrl_llm.cli`."""

from jaxrl_llm.cli import main

main()
