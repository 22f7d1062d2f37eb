"""A small HTTP server with the documented interfaces of vLLM and SGLang; it scores and embeds with a tiny model.

SGLang needs CUDA to install, so its interface is tested with this alone; vLLM's is also tested with vLLM (`test_vllm`).
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


def by_bytes(text, special=False):
    """Tokens of a text: its bytes; 256 behind it is special."""
    return [*text.encode(), *([256] if special else [])]


class StandIn:
    """What the server does, and what it was asked. A test changes the attributes.

    `before` runs in every request, with its number, and may return a status to answer with, or raise; `change` gets the ids
    and log-probabilities of an answer and returns others.
    """

    def __init__(self, model, kind="vllm", tokenize=by_bytes, longest=90):
        self.model, self.kind, self.tokenize, self.longest = model, kind, tokenize, longest
        self.url, self.asked, self.keys = "", [], set()
        self.before = lambda number: None
        self.change = lambda ids, logprobs: (ids, logprobs)

    def answer(self, path, body):
        """Status and answer of a request."""
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "owned_by": self.kind, "max_model_len": self.longest}]}
        if path == "/tokenize":
            return 200, {"tokens": self.tokenize(body["prompt"], body["add_special_tokens"])}
        if path == "/v1/embeddings":
            (ids,) = body["input"]
            return 200, {"data": [{"embedding": self.states(ids)[-1].tolist()}]}
        if path == "/v1/completions" and self.kind == "vllm":
            assert (body["model"], body["prompt_logprobs"], body["max_tokens"]) == ("tiny", 0, 1)
            ids, logprobs = self.scored(body["prompt"])
            entries = [{str(token): {"logprob": each}} for token, each in zip(ids[1:], logprobs, strict=True)]
            return 200, {"choices": [{"prompt_logprobs": [None, *entries]}]}
        if path == "/generate" and self.kind == "sglang":
            assert (body["return_logprob"], body["logprob_start_len"]) == (True, 0)
            ids, logprobs = self.scored(body.get("text") or body["input_ids"])
            entries = [[each, token, None] for token, each in zip(ids, [None, *logprobs], strict=True)]
            return 200, {"meta_info": {"input_token_logprobs": entries}}
        return 404, {"detail": "Not Found"}

    def scored(self, prompt):
        text = isinstance(prompt, str)
        ids = self.tokenize(prompt) if text else prompt
        assert len(ids) < self.longest - (6 if self.kind == "sglang" else 0), "more than it reads"
        with torch.inference_mode():
            found = self.model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        logprobs = [float(found[place, token]) for place, token in enumerate(ids[1:])]
        return (ids, logprobs) if text else self.change(ids, logprobs)

    def states(self, ids):
        assert len(ids) <= self.longest
        with torch.inference_mode():
            return self.model.base_model(torch.tensor([ids])).last_hidden_state[0]


@contextmanager
def serving(stand_in):
    """Serve until the end of the context."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            stand_in.keys.add(self.headers.get("Authorization"))
            stand_in.asked.append(self.path)
            status = stand_in.before(len(stand_in.asked))
            if status == "hang up":
                self.close_connection = True
                return
            status, answer = (
                (status, {"error": "as told"}) if status else stand_in.answer(self.path, json.loads(body or b"{}"))
            )
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST  # noqa: N815 - http.server's names

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
