"""Models that run elsewhere: whatever answers OpenAI's HTTP interface is a `quantkit_eval.protocol.Model`."""

from quantkit_eval.targets.http_requests import RequestLimits
from quantkit_eval.targets.openai_server import LocalTokenizer, OpenAIServer, is_url

__all__ = ["LocalTokenizer", "OpenAIServer", "RequestLimits", "is_url"]
