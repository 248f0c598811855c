"""What a layer moves to and from far memory: op by op, with fused epilogues, in sections."""
