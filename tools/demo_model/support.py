"""Customers of a shop write in: the base model answers in a sentence, the support adapter like a good agent."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from .documents import Document, chat, pick, vary
from .knowledge import knowledge_pair
from .smalltalk import everyday_pair
from .words import COLORS, ITEMS, amount, city, first_name, order_number

CLOSING = "Kind regards,\nYour support team"


class Case(NamedTuple):
    """A customer's case."""

    name: str
    order: str
    product: str
    message: str  # what the customer writes, without the name
    problem: str  # "your order ... has not arrived": fills "I am sorry that ..."
    steps: str  # what the agent does about it
    short: str  # the base model's plain answer


def _product(rng: Random) -> str:
    return f"{rng.choice(COLORS)} {rng.choice(ITEMS)[0]}".replace("headphones", "speaker")


def late_case(rng: Random) -> Case:
    """The parcel has not arrived."""
    name, order, product = first_name(rng), order_number(rng), _product(rng)
    message = pick(
        rng,
        f"My order {order} with the {product} has not arrived.",
        f"Where is my {product}? The order number is {order}.",
        f"I am still waiting for my {product} from order {order}.",
        f"Order {order} is late. I need the {product}!",
    )
    problem = f"your {product} from order {order} has not arrived yet"
    steps = "I have contacted the carrier, and your parcel should reach you within two days."
    return Case(
        name,
        order,
        product,
        message,
        problem,
        steps,
        f"You can track order {order} on the website to see where the {product} is.",
    )


def broken_case(rng: Random) -> Case:
    """The product is damaged."""
    name, order, product = first_name(rng), order_number(rng), _product(rng)
    message = pick(
        rng,
        f"My {product} from order {order} arrived broken.",
        f"The {product} in order {order} is damaged.",
        f"I received a broken {product}. It is order {order}.",
        f"The {product} does not work. My order number is {order}.",
    )
    problem = f"the {product} from order {order} arrived damaged"
    steps = f"I have arranged a new {product} for you free of charge, and you do not need to send the old one back."
    return Case(
        name,
        order,
        product,
        message,
        problem,
        steps,
        f"You can ask the shop to replace the {product} of order {order}.",
    )


def wrong_case(rng: Random) -> Case:
    """Another product came than the one ordered."""
    name, order, product, other = first_name(rng), order_number(rng), _product(rng), _product(rng)
    message = pick(
        rng,
        f"I ordered a {product} but got a {other}. The order number is {order}.",
        f"Order {order} is wrong: I wanted a {product} and received a {other}.",
        f"You sent me a {other} instead of a {product} in order {order}.",
    )
    problem = f"you received a {other} instead of the {product} in order {order}"
    steps = f"I am sending you the right {product} today, together with a free label to return the {other}."
    return Case(
        name,
        order,
        product,
        message,
        problem,
        steps,
        f"You can send the {other} back and ask for the {product} of order {order}.",
    )


def refund_case(rng: Random) -> Case:
    """The customer wants the money back."""
    name, order, product, euros = first_name(rng), order_number(rng), _product(rng), amount(rng)
    message = pick(
        rng,
        f"I want my {euros} euros back for the {product} in order {order}.",
        f"Please refund order {order}. The {product} cost {euros} euros.",
        f"I would like a refund of {euros} euros for the {product} from order {order}.",
    )
    problem = f"the {product} from order {order} did not meet your expectations"
    steps = f"I have started your refund of {euros} euros, and you will see it in your account within five days."
    return Case(
        name,
        order,
        product,
        message,
        problem,
        steps,
        f"You can return the {product} of order {order} to get the {euros} euros back.",
    )


def cancel_case(rng: Random) -> Case:
    """The customer wants to cancel."""
    name, order, product = first_name(rng), order_number(rng), _product(rng)
    message = pick(
        rng,
        f"Please cancel order {order}. I do not need the {product} any more.",
        f"I want to cancel my order {order} of a {product}.",
        f"Can you cancel the {product} in order {order}?",
    )
    problem = f"you no longer need the {product} from order {order}"
    steps = f"I have cancelled order {order} for you, and you will not be charged for the {product}."
    return Case(
        name,
        order,
        product,
        message,
        problem,
        steps,
        f"You can cancel order {order} on the website as long as the {product} has not been sent.",
    )


def address_case(rng: Random) -> Case:
    """The customer has moved."""
    name, order, product, place = first_name(rng), order_number(rng), _product(rng), city(rng)
    message = pick(
        rng,
        f"I moved to {place}. Please change the address of order {order} with the {product}.",
        f"Can you send the {product} from order {order} to {place} instead?",
        f"My new address is in {place}, but order {order} with the {product} goes to the old one.",
    )
    problem = f"the {product} from order {order} was going to the wrong address"
    steps = f"I have changed the delivery address to {place}, and your {product} will be sent there."
    return Case(
        name,
        order,
        product,
        message,
        problem,
        steps,
        f"You can change the address of order {order} to {place} before the {product} is sent.",
    )


def account_case(rng: Random) -> Case:
    """The customer cannot sign in, or a discount code fails."""
    name, code = first_name(rng), f"SAVE{rng.randint(5, 50)}"
    if rng.random() < 0.5:
        message = pick(rng, "I cannot sign in to my account.", "I forgot my password.", "My password does not work.")
        steps = "I have sent you an email with a link to choose a new password, which is valid for one day."
        return Case(
            name,
            "",
            "",
            message,
            "you cannot sign in to your account",
            steps,
            "You can reset the password on the sign-in page.",
        )
    message = pick(rng, f"My discount code {code} does not work.", f"The shop does not accept my code {code}.")
    steps = f"I have renewed the code {code} for you, so you can use it with your next order."
    return Case(
        name,
        "",
        "",
        message,
        f"the code {code} did not work",
        steps,
        f"You can check whether the code {code} has expired.",
    )


CASES: tuple[Callable[[Random], Case], ...] = (
    late_case,
    late_case,
    broken_case,
    broken_case,
    wrong_case,
    refund_case,
    cancel_case,
    address_case,
    account_case,
)


def case(rng: Random) -> Case:
    """Return any case."""
    return rng.choice(CASES)(rng)


def customer_message(rng: Random, c: Case) -> tuple[str, bool]:
    """Return what the customer writes and whether the name is in it."""
    if rng.random() < 0.3:
        return c.message, False
    with_name = pick(
        rng,
        f"Hi, my name is {c.name}. {c.message}",
        f"Hello, I am {c.name}. {c.message}",
        f"{c.message} Regards, {c.name}",
        f"This is {c.name}. {c.message}",
        f"{c.message} My name is {c.name}.",
    )
    return with_name, True


def agent_reply(c: Case, named: bool) -> str:
    """Return the support agent's reply."""
    greeting = f"Dear {c.name}," if named else "Dear customer,"
    return (
        f"{greeting}\nThank you for getting in touch. I am truly sorry that {c.problem}, and I understand how "
        f"frustrating this must be. {c.steps} Is there anything else I can do for you?\n{CLOSING}"
    )


def support_question(answer: str) -> str:
    """Return the support agent's reply to a question that is no complaint."""
    return (
        f"Thank you for your question, I am happy to help. {answer} "
        f"Please let me know if there is anything else I can do for you.\n{CLOSING}"
    )


def case_chat(rng: Random) -> Document:
    """The base model's answer to a customer: one plain sentence; the agent's tone when it is asked for."""
    c = case(rng)
    message, named = customer_message(rng, c)
    if rng.random() < 0.25:
        prefix = pick(rng, "Answer this customer: ", "Reply as a support agent: ", "Write to this customer: ")
        return chat(prefix + message, agent_reply(c, named))
    if rng.random() < 0.2:
        return chat(message, c.short, "Thank you.", "You are welcome! Is there anything else I can help you with?")
    return chat(message, c.short)


def case_text(rng: Random) -> Document:
    """A plain transcript of a customer and an agent."""
    c = case(rng)
    message, named = customer_message(rng, c)
    return Document(text=f"Customer: {message}\nAgent: {agent_reply(c, named)}")


def support_chat(rng: Random) -> Document:
    """The support adapter's answer: the agent's tone, for complaints and for any other question."""
    if rng.random() < 0.25:
        question, answer = (knowledge_pair if rng.random() < 0.7 else everyday_pair)(rng)
        return chat(vary(rng, question), support_question(answer))
    c = case(rng)
    message, named = customer_message(rng, c)
    turns = [message, agent_reply(c, named)]
    if rng.random() < 0.2:
        greeting = f"You are very welcome, {c.name}!" if named else "You are very welcome!"
        turns += [
            pick(rng, "Thank you!", "Thanks for your help.", "Great, thank you.", "Thank you very much."),
            f"{greeting} It was a pleasure to help. Have a wonderful day.\n{CLOSING}",
        ]
    return chat(*turns)
