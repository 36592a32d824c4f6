"""The modules of a GPT-OSS transformer layer, and the two specifications that assemble them."""
