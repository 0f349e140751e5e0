"""The reference engine behind the protocol of OpenAI's servers, on this machine only."""
