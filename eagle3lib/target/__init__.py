"""The target model: its folder, its facts, its hidden states."""
