"""``gptoss certify``: does a trainer or an engine compute GPT-OSS?"""
