"""JetStream's Driver over pages: the tokens and log-probs of the ring in this process."""

from test_decode import MODEL, PARAMS, PROMPTS, TOKENIZER, answers, assert_same, make, requests

from jaxrl_llm.sampler import decode, weights
from jaxrl_llm.serving import backend


def test_the_driver_over_few_pages():
    engine = make(MODEL, slots=6)
    asked = requests(engine, PROMPTS)
    sizes = {"slots": 6, "max_prompt_tokens": 20, "max_tokens": 40, "tokens_per_call": 8}
    held = weights.push(MODEL, PARAMS, None)
    driver = backend.DriverBackend(MODEL, TOKENIZER, held, cache="pages", page_tokens=4, kv_tokens=120, **sizes)
    try:
        drawn = [future.result(120) for future in [driver.submit(request) for request in asked]]
    finally:
        driver.close()
    assert_same(answers(drawn), answers(decode.generate(engine, asked)))
