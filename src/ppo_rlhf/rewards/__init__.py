"""Where scores come from (models, functions, servers), and what becomes of them before PPO learns from them."""
