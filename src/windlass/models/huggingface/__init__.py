"""Models of Hugging Face: their folders read as ours and ours written as theirs.

How a `model_type` names and lays out its numbers and tensors is data: one file a type in
`families/`. `transformers` is never needed.
"""
