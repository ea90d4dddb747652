"""From a question to its passages or answer: batches of questions, and the edition that answers them."""
