"""Evaluation of trained models: perplexity, scores of continuations, greedy generation, EleutherAI's harness."""
