"""What serves the APIs: jobs, prompts, answers, the thread of each engine, and the models that are in memory."""
