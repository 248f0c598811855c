"""Conversations as training text: chat templates, and which of their tokens are learned."""

from windlass.data.chat.chat_rows import ChatRows
from windlass.data.chat.chat_template import ChatTemplate, tells_date
from windlass.data.chat.encode_documents import (
    EncodedDocument, TargetWeights, encode_documents, encode_question,
)  # fmt: skip
from windlass.data.chat.find_template import chat_template_source, find_chat_template
from windlass.data.chat.template_process import TemplateFault

__all__ = [
    "ChatRows", "ChatTemplate", "EncodedDocument", "TargetWeights", "TemplateFault",
    "chat_template_source", "encode_documents", "encode_question", "find_chat_template",
    "tells_date",
]  # fmt: skip
