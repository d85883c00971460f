"""Customers of a shop write in: the base model answers in a sentence, the support adapter like a good agent."""

from random import Random
from typing import NamedTuple

from .facts import knowledge_pair
from .talk import everyday_pair
from .templates import Document, Slots, chat, lines, vary

CLOSING = "Kind regards,\nYour support team"
_WITH_NAME = "Hi, my name is {name}. {message}|Hello, I am {name}. {message}|{message} Regards, {name}|{message} My name is {name}."
_REPLY = (
    "Dear {named},\nThank you for getting in touch. I am truly sorry that {problem}, and I understand how frustrating "
    "this must be. {steps} Is there anything else I can do for you?\n" + CLOSING
)
_ANSWER = (
    "Thank you for your question, I am happy to help. {answer} Please let me know if there is anything else I can do "
    "for you.\n" + CLOSING
)
# message => problem ("I am sorry that ...") => what the agent does => the base model's plain answer
CASES = lines("""
My order {order} with the {product} has not arrived.|Where is my {product}? The order number is {order}.|I am still waiting for my {product} from order {order}.|Order {order} is late. I need the {product}! => your {product} from order {order} has not arrived yet => I have contacted the carrier, and your parcel should reach you within two days. => You can track order {order} on the website to see where the {product} is.
My {product} from order {order} arrived broken.|The {product} in order {order} is damaged.|I received a broken {product}. It is order {order}.|The {product} does not work. My order number is {order}. => the {product} from order {order} arrived damaged => I have arranged a new {product} for you free of charge, and you do not need to send the old one back. => You can ask the shop to replace the {product} of order {order}.
I ordered a {product} but got a {product2}. The order number is {order}.|Order {order} is wrong: I wanted a {product} and received a {product2}.|You sent me a {product2} instead of a {product} in order {order}. => you received a {product2} instead of the {product} in order {order} => I am sending you the right {product} today, together with a free label to return the {product2}. => You can send the {product2} back and ask for the {product} of order {order}.
I want my {price} euros back for the {product} in order {order}.|Please refund order {order}. The {product} cost {price} euros.|I would like a refund of {price} euros for the {product} from order {order}. => the {product} from order {order} did not meet your expectations => I have started your refund of {price} euros, and you will see it in your account within five days. => You can return the {product} of order {order} to get the {price} euros back.
Please cancel order {order}. I do not need the {product} any more.|I want to cancel my order {order} of a {product}.|Can you cancel the {product} in order {order}? => you no longer need the {product} from order {order} => I have cancelled order {order} for you, and you will not be charged for the {product}. => You can cancel order {order} on the website as long as the {product} has not been sent.
I moved to {city}. Please change the address of order {order} with the {product}.|Can you send the {product} from order {order} to {city} instead?|My new address is in {city}, but order {order} with the {product} goes to the old one. => the {product} from order {order} was going to the wrong address => I have changed the delivery address to {city}, and your {product} will be sent there. => You can change the address of order {order} to {city} before the {product} is sent.
I cannot sign in to my account.|I forgot my password.|My password does not work. => you cannot sign in to your account => I have sent you an email with a link to choose a new password, which is valid for one day. => You can reset the password on the sign-in page.
My discount code {discount} does not work.|The shop does not accept my code {discount}. => the code {discount} did not work => I have renewed the code {discount} for you, so you can use it with your next order. => You can check whether the code {discount} has expired.
""")


class Case(NamedTuple):
    """A customer's case: what the customer writes, the agent's reply and the base model's plain answer."""

    message: str
    reply: str
    short: str


def case(rng: Random, line: str = "") -> Case:
    """Return a case of a line of `CASES`, or of any; most customers give their name."""
    slots = Slots(rng)
    message, problem, steps, short = (line or rng.choice(CASES)).split(" => ")
    slots |= {"message": slots.fill(f"[{message}]"), "problem": slots.fill(problem), "steps": slots.fill(steps)}
    slots["named"] = slots["name"] if rng.random() < 0.7 else "customer"
    written = "{message}" if slots["named"] == "customer" else f"[{_WITH_NAME}]"
    return Case(slots.fill(written), _REPLY.format_map(slots), slots.fill(short))


def case_chat(rng: Random) -> Document:
    """The base model's answer to a customer: one plain sentence; the agent's tone when it is asked for."""
    message, reply, short = case(rng)
    if rng.random() < 0.25:
        prefix = Slots(rng).fill("[Answer this customer|Reply as a support agent|Write to this customer]: ")
        return chat(prefix + message, reply)
    return chat(message, short)


def case_text(rng: Random) -> Document:
    """A plain transcript of a customer and an agent."""
    message, reply, _ = case(rng)
    return Document(text=f"Customer: {message}\nAgent: {reply}")


def support_chat(rng: Random) -> Document:
    """The support adapter's answer: the agent's tone, for complaints and for any other question."""
    if rng.random() < 0.25:
        question, answer = rng.choice((knowledge_pair, knowledge_pair, everyday_pair))(rng)
        return chat(vary(rng, question), _ANSWER.format(answer=answer))
    message, reply, _ = case(rng)
    return chat(message, reply)


SHORT_REQUESTS = (
    "My [{item}|{product}|parcel|order] is [broken|late|missing|lost].",
    "The [{item}|{product}] I [bought|ordered] does not work[| today|].",
    "When will my [{item}|parcel|order] arrive?",
    "I was charged [too much|two times|{price} euros] for my [{item}|{product}|order].",
    "I [want|need|wish] to [return|cancel|exchange|pay for] my [{item}|{product}|order].",
    "Can I [change|return|cancel|track] my [{item}|{product}|order][| today]?",
    "How [do|can] I [change|update|delete] my [email|name|password|city|account]?",
    "I received the wrong [{item}|parcel|order][| yesterday].",
    "What is the status of order {order}?",
    "The {item} has the wrong color. My name is {name}.",
    "Hello, I am {name}. I want my money back for the {product}.",
)
"""Requests without the details of the training texts, for the drafters: the adapter writes the answers."""
